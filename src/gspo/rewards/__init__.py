"""Rewards: reward functions and sets of them, verifiers, and the killable processes that run verifiers.

Nothing is imported here: the worker process imports this package and must start without torch.
"""
