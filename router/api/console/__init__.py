"""The web console: a page that shows the live cluster, and the JSON that it is drawn from.

Served by the HTTP front door under `/console/`. Everything is read only; what it may cost the
router and the workers is bounded in `kvferry.limits`. Reading order: `service` (paths and
parameters), `access` (who may look), `snapshot` and `recorder` (what is told), `page` (files).
"""
