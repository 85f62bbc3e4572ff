"""What passes before the first step."""
