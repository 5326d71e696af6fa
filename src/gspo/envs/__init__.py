"""Environments: what turns prompts into scored rollouts, and the generated tasks."""
