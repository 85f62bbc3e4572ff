"""Configurations of clusters: files to copy and adapt, and a development cluster of two nodes."""
