"""Stand-ins for other systems' names, so that code written for them runs with only its imports changed."""
