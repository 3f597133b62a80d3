"""Tests of forge_core.data."""
