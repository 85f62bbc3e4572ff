"""Benches of several workers against one."""
