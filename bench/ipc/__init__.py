"""Dispatch between two processes of one machine: our channel beside what else Python offers."""
