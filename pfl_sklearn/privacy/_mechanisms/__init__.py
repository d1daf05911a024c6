"""Mechanisms that clip, quantize or randomize what clients send: one module each."""
