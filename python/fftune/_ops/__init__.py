"""The ops, a module for each: its declaration, its gradient, and the functions that fftune.ops has."""
