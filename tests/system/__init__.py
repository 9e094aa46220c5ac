"""Tests that start real servers."""
