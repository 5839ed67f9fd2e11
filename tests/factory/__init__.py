"""Tests of the simulated token factory."""
