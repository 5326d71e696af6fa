"""Routing of mixtures of experts: recorded, measured, replayed. No modelling code is copied."""
