"""Replays traffic in virtual time against the runtime's own scheduler, with the costs of an artifact's cells."""
