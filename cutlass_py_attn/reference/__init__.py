"""The NumPy reference implementation of attention and its gradients."""
