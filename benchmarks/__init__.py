"""Whole steps of the same work, here and in another trainer, alternating in one run. See docs/performance.md."""
