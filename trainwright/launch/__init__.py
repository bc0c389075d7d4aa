"""Starting the processes of a job, and ending all of them when one fails."""
