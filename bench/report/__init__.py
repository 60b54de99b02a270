"""Show records: terminal, Markdown, HTML, figures."""
