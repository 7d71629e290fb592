"""What the commands show: units, tables, pages, figures and progress."""
