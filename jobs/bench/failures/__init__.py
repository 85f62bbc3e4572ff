"""What failures cost: deaths of workers and hosts, and kills at any moment."""
