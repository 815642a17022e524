"""Parts of the A/B job `ab_fsdp2.py`: one concern a file."""
