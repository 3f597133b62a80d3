"""Losses, advantages and the rules that decide every episode's fate."""
