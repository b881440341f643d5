"""Tuning: trials on the device itself, one change at a time, each a line of a logbook, and what follows from them."""
