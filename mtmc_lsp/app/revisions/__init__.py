"""What a user decides about the steps of a run: remove one and keep the others, or replace one."""
