"""How the weights, their gradients and the optimizer's states are spread over the ranks."""
