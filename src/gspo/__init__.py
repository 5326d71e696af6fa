"""Reinforcement-learning post-training at the level of whole answers."""
