"""Tests of the cluster's parts."""
