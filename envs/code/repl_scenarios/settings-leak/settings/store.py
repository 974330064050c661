from settings.parser import parse


class Settings:
    """Settings of several texts, where later ones win."""

    def __init__(self, *texts):
        self.sections = {}
        for text in texts:
            parse(text, self.sections)

    def get(self, key, section="", default=None):
        return self.sections.get(section, {}).get(key, default)

    def section(self, name):
        return dict(self.sections.get(name, {}))
