"""What is drawn in a terminal: tables and progress."""
