"""The study of whether two unequal devices beat the fast one alone; PLAN.md says all of it."""
