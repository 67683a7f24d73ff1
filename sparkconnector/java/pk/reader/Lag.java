// How far a stream is behind: for each partition the newest offset that Python reported at the last
// trigger, less an offset that the query reaches.  Java compares the two offsets' JSON and asks no broker.
//
// Local invariant
//   T1  A partition that the reached offset does not name has no lag here: where it begins, only Python
//       knows.
package pk.reader;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

public final class Lag {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final String MOST = "pkLagMax";
  private static final String SUM = "pkLagSum";
  /** How many partitions the words name; a plan's text is kept for each batch. */
  private static final int NAMED_MOST = 100;

  private final Map<String, Long> behind = new TreeMap<>();
  private long sum;
  private long most;

  private Lag() {}

  /** Returns the lag of an offset; null if the texts are no offsets of pk. */
  static Lag between(String newest, String reached) {
    Lag found = new Lag();
    try {
      JsonNode done = JSON.readTree(reached).path("topics");
      JsonNode topics = JSON.readTree(newest).path("topics");
      for (var names = topics.fieldNames(); names.hasNext(); ) {
        String topic = names.next();
        found.add(topic, topics.path(topic).path("offsets"), done.path(topic).path("offsets"));
      }
    } catch (IOException cause) {
      return null;
    }
    return found;
  }

  private void add(String topic, JsonNode ends, JsonNode offsets) {
    for (var numbers = ends.fieldNames(); numbers.hasNext(); ) {
      String partition = numbers.next();
      if (!offsets.has(partition)) {
        continue; // T1
      }
      long lag = ends.path(partition).asLong() - offsets.path(partition).asLong();
      lag = Math.max(0, lag);
      behind.put(topic + "-" + partition, lag);
      sum += lag;
      most = Math.max(most, lag);
    }
  }

  /** Puts the lag of each partition, and of all, into the progress of a query. */
  void addTo(Map<String, String> progress) {
    behind.forEach((partition, lag) -> progress.put("lag." + partition, Long.toString(lag)));
    progress.put("lagMax", Long.toString(most));
    progress.put("lagSum", Long.toString(sum));
  }

  /** Returns `TOPIC-PARTITION: lag, …` with the largest lag first. */
  String inWords() {
    List<Map.Entry<String, Long>> all = new ArrayList<>(behind.entrySet());
    all.sort((one, other) -> Long.compare(other.getValue(), one.getValue()));
    List<String> words = new ArrayList<>();
    for (Map.Entry<String, Long> each : all.subList(0, Math.min(all.size(), NAMED_MOST))) {
      words.add(each.getKey() + ": " + each.getValue());
    }
    String more = all.size() > NAMED_MOST ? " and " + (all.size() - NAMED_MOST) + " more" : "";
    return String.join(", ", words) + more;
  }

  /** Returns what the driver reports for a batch in the SQL tab. */
  CustomTaskMetric[] values() {
    return new CustomTaskMetric[] {new Metrics.Value(MOST, most), new Metrics.Value(SUM, sum)};
  }

  static CustomMetric[] metrics() {
    return new CustomMetric[] {new Most(), new Sum()};
  }

  /** The driver reports a number once for each batch; Spark creates the class by its name. */
  private abstract static class Reported implements CustomMetric {
    @Override
    public String aggregateTaskMetrics(long[] values) {
      long found = 0;
      for (long each : values) {
        found = Math.max(found, each);
      }
      return Long.toString(found);
    }
  }

  public static final class Most extends Reported {
    @Override
    public String name() {
      return MOST;
    }

    @Override
    public String description() {
      return "offsets behind after this batch, of the partition that is behind most";
    }
  }

  public static final class Sum extends Reported {
    @Override
    public String name() {
      return SUM;
    }

    @Override
    public String description() {
      return "offsets behind after this batch, all partitions";
    }
  }
}
