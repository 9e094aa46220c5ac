"""Scheduling in virtual time: what a decision costs and how good the policy is."""
