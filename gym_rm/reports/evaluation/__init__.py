"""What did an evaluation or an audit find? Tables for the console, and a page."""
