"""Runs on several processes that meet in the store alone."""
