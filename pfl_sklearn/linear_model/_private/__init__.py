"""Private fits of the mixed models: messages of clients, sums with noise, a server."""
