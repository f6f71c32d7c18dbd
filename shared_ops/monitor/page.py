"""The report's page, a Jinja template (kept in a module, so that it is installed wherever the code is)."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }} · {{ twin }}</title>
<style>
  :root { --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --page: #f6f8fb; --card: #fff; }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--page); color: var(--ink);
         font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
  main { max-width: 1280px; margin: 0 auto; padding: 28px 20px 48px; }
  header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 14px; margin-bottom: 20px; }
  h1 { font-size: 26px; letter-spacing: -.01em; margin: 0; overflow-wrap: anywhere; }
  .twin { background: #dbeafe; color: #1e40af; border-radius: 99px; padding: 2px 11px; font-size: 13px; }
  .written { color: var(--soft); font-size: 13px; margin-left: auto; }
  .grid { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .tiles { display: grid; gap: 12px; margin-bottom: 16px;
           grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
  .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
          box-shadow: 0 1px 2px rgba(15, 23, 42, .04); min-width: 0; }
  .wide { grid-column: 1 / -1; }
  .tile b { display: block; font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; }
  .tile span, .tile small { color: var(--soft); font-size: 13px; }
  h2 { font-size: 16px; margin: 0 0 4px; }
  .text { color: var(--soft); font-size: 13px; margin: 0 0 6px; }
  dl { columns: 2; column-gap: 48px; margin: 4px 0 0; font-size: 14px; }
  dl div { display: flex; gap: 14px; padding: 6px 0; border-bottom: 1px solid var(--line);
           break-inside: avoid; }
  dt { color: var(--soft); flex: 0 0 38%; }
  dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
  ul { list-style: none; margin: 6px 0 0; padding: 0; }
  li { padding: 8px 12px; border-radius: 8px; margin-top: 8px; border-left: 4px solid;
       overflow-wrap: anywhere; }
  .good { background: #ecfdf5; border-color: #10b981; }
  .warn { background: #fffbeb; border-color: #f59e0b; }
  .bad { background: #fef2f2; border-color: #ef4444; }
  footer { color: var(--soft); font-size: 13px; margin-top: 20px; overflow-wrap: anywhere; }
  @media (max-width: 860px) {
    dl { columns: 1; }
    .grid { grid-template-columns: minmax(0, 1fr); }
    main { padding: 18px 12px 32px; }
  }
</style>
<script>{{ plotly_js }}</script>
</head>
<body>
<main>
  <header>
    <h1>{{ name }}</h1><span class="twin">{{ twin }}</span><span class="written">written {{ written }}</span>
  </header>
  <section class="tiles">
    {% for title, value, small in tiles %}
    <div class="card tile"><span>{{ title }}</span><b>{{ value }}</b><small>{{ small }}</small></div>
    {% endfor %}
  </section>
  <div class="grid">
    <section class="card wide">
      <h2>Health</h2>
      <ul>
        {% for remark in remarks %}
        <li class="{{ remark.level }}">{{ remark.text }}</li>
        {% endfor %}
      </ul>
    </section>
    <section class="card wide">
      <h2>Summary</h2>
      <dl>
        {% for what, value in table %}
        <div><dt>{{ what }}</dt><dd>{{ value }}</dd></div>
        {% endfor %}
      </dl>
    </section>
    {% for chart in charts %}
    <section class="card{{ ' wide' if chart.wide }}">
      <h2>{{ chart.title }}</h2>
      {% if chart.text %}
      <p class="text">{{ chart.text }}</p>
      {% endif %}
      {{ chart.markup }}
    </section>
    {% endfor %}
  </div>
  <footer>{{ folder }}</footer>
</main>
</body>
</html>
"""
