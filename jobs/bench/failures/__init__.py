"""What failures cost: deaths of workers and hosts."""
