"""Tokenizes dataset rows, packs and orders them, and collates them into batches."""
