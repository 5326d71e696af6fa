"""Engines that sample responses, behind one contract."""
