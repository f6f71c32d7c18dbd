"""The page of a comparison, a Jinja template (in a module, so that it is installed wherever the code is)."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ names[0] }} and {{ names[1] }}</title>
<style>
  :root { --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --page: #f6f8fb; --card: #fff; }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--page); color: var(--ink);
         font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
  main { max-width: 1280px; margin: 0 auto; padding: 28px 20px 48px; display: grid; gap: 16px; }
  header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 14px; }
  h1 { font-size: 26px; letter-spacing: -.01em; margin: 0; }
  h2 { font-size: 16px; margin: 0 0 4px; }
  .written { color: var(--soft); font-size: 13px; margin-left: auto; }
  .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
          box-shadow: 0 1px 2px rgba(15, 23, 42, .04); min-width: 0; }
  .verdict { border-left: 6px solid; font-size: 17px; overflow-wrap: anywhere; }
  .good { background: #ecfdf5; border-color: #10b981; }
  .bad { background: #fef2f2; border-color: #ef4444; }
  .text { color: var(--soft); font-size: 13px; margin: 6px 0; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 4px 0 0; font-size: 14px; }
  dt { color: var(--soft); }
  dd { margin: 0; overflow-wrap: anywhere; }
  .scroll { overflow: auto; max-height: 640px; }
  table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
  th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600; }
  th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
  th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
  .over { color: #b91c1c; font-weight: 600; }
  tr.first td { background: #fef2f2; }
  code { font-size: 13px; }
</style>
<script>{{ plotly_js }}</script>
</head>
<body>
<main>
  <header>
    <h1>{{ names[0] }} and {{ names[1] }}, module by module</h1><span class="written">written {{ written }}</span>
  </header>
  <section class="card verdict {{ 'good' if verdict.agrees else 'bad' }}">
    {{ verdict.sentence }}.
    {% for place in verdict.sources %}
    <br><code>{{ place }}</code>
    {% endfor %}
  </section>
  <section class="card">
    <h2>What was compared</h2>
    <dl>
      {% for what, value in facts %}
      <dt>{{ what }}</dt><dd>{{ value }}</dd>
      {% endfor %}
    </dl>
    {% for line in remarks %}
    <p class="text">{{ line }}</p>
    {% endfor %}
  </section>
  {% for chart in charts %}
  <section class="card">
    <h2>{{ chart.title }}</h2>
    <p class="text">{{ chart.text }}</p>
    {{ chart.markup }}
  </section>
  {% endfor %}
  {% if steps %}
  <section class="card">
    <h2>Optimizer steps</h2>
    <p class="text">As training makes them: a compiled graph in MindSpore. Of the parameters only what their moments do
      not explain is a difference.</p>
    <div class="scroll"><table>
      <tr><th>step</th><th>loss {{ names[0] }}</th><th>loss {{ names[1] }}</th><th>pairs moved</th>
        {% for name in quantities %}<th>{{ name }}</th>{% endfor %}</tr>
      {% for step in steps %}
      <tr><td>{{ step.step }}</td>{% for loss in step.losses %}<td>{{ loss }}</td>{% endfor %}<td>{{ step.moved }}</td>
        {% for value, over, of in step.cells %}
        <td{% if over %} class="over"{% endif %}{% if of %} title="{{ of }}"{% endif %}>{{ value }}</td>
        {% endfor %}</tr>
      {% endfor %}
    </table></div>
  </section>
  {% endif %}
  <section class="card">
    <h2>Every call of a module, in the order of the data</h2>
    <p class="text">The largest difference relative to the tensor's largest value; of choices and integers the share of
      rows that differ. Bound {{ bound }}.</p>
    <div class="scroll"><table>
      <tr><th>module</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
      {% for row in rows %}
      <tr{% if row.first %} class="first"{% endif %}><td>{{ row.name }}</td>
        {% for value, over in row.cells %}<td{% if over %} class="over"{% endif %}>{{ value }}</td>{% endfor %}</tr>
      {% endfor %}
    </table></div>
  </section>
</main>
</body>
</html>
"""
