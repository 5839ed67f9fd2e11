"""Simulated worker nodes that replay real request traces."""
