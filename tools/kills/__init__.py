"""Kill trainings; resumed ones have to end with the bits of unbroken ones."""
