"""Tests that execute compiled PTX on the CPU."""
