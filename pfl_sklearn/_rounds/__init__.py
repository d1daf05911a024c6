"""The loop over communication rounds, whatever the model."""
