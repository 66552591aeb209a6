"""Rounds of drafts: who proposes tokens, how they are verified, and what is kept."""
