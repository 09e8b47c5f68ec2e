"""The definitions of ops in plain PyTorch, a module for each kind; fftune.reference has all."""
