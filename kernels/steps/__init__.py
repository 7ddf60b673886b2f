"""The kinds of steps that a program is made of, a file each or a family a file."""
