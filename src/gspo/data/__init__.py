"""Data: files and generated problems in, prompts with token ids out."""
