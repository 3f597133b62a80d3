"""Tests of forge_core.rewards."""
