"""Measuring what was learned."""
