from template.engine import Template, TemplateError

__all__ = ["Template", "TemplateError"]
