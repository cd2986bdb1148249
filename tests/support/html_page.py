"""What an HTML page is made of."""

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "link", "img"}


class Document(HTMLParser):
    """A page's tags, attributes by name, and text. wrong: tags that are not closed, or not opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.attributes, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.wrong += [] if self.open and self.open[-1] == tag else [tag]
        self.open = self.open[:-1]

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def values(self, *names):
        return [value for name, value in self.attributes if name in names]

    @property
    def videos(self):
        return [value for value in self.values("src") if not value.startswith("data:image/png;base64,")]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
