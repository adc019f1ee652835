"""Replaying what a real llama.cpp did, and comparing value by value."""
