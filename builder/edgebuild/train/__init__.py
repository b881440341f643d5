"""Training of the drafter: text that the model itself writes, and an MTP module that learns to guess it."""
