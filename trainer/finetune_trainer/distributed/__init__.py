"""What concerns ranks: their context, collectives, the hardware check and heartbeats."""
