"""What `import megarlhf` offers. Import the names from `megarlhf`, not from here."""
